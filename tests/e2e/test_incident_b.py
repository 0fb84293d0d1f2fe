"""Incident B through offbeat's mesh: a reduction under a guard that not all members pass is refused at once.

The MTP loss is reduced over DP and CP on the last stage of the pipeline. The faulty form in plain torch is
`incident_b` of the fault catalogue.
"""

import pytest
import torch
import torch.distributed as dist

from offbeat_core import GuardError

# dp, cp, tp, pp
SIZES = [(1, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1), (1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 1, 2), (1, 2, 2, 2)]
meshes = pytest.mark.parametrize(
    "mesh",
    [dict(zip(("dp", "cp", "tp", "pp"), sizes, strict=True)) for sizes in SIZES],
    ids=lambda axes: "-".join(f"{axis}{size}" for axis, size in axes.items()),
    indirect=True,
)


def samples(mesh):
    """Return the losses of this rank's place along dp and cp; they are the same on all its tensor parallel peers."""
    place = mesh.coordinates["dp"] * mesh.axes["cp"] + mesh.coordinates["cp"]
    return torch.tensor([1.0 + 3 * place, 2.0 + place])


def mean_of_all(mesh):
    """Compute what one process with all samples computes."""
    places = range(mesh.axes["dp"] * mesh.axes["cp"])
    return sum(3.0 + 4 * place for place in places) / (2 * len(places))


def report_mtp_loss(mesh, log, *, num_virtual_stages=1, mtp=True):
    """Use the right form: the last stage takes part, its first rank reports; virtual stages have no influence."""
    for stage in range(num_virtual_stages):
        if not mtp or stage < num_virtual_stages - 1:
            continue
        with mesh.where(pp="last") as takes_part:
            if not takes_part:
                continue
            sums = torch.stack([samples(mesh).sum(), torch.tensor(2.0)])
            mesh.group("dp", "cp").all_reduce(sums)
        if mesh.where(pp="last", dp=0, cp=0, tp=0):
            log.append((sums[0] / sums[1]).item())


@meshes
def test_the_metric_is_that_of_one_process_and_is_logged_once(mesh):
    everybody = mesh.group("dp", "cp", "tp", "pp")
    for num_virtual_stages, mtp in [(1, True), (2, True), (2, False)]:
        log = []
        report_mtp_loss(mesh, log, num_virtual_stages=num_virtual_stages, mtp=mtp)
        logged = [value for values in everybody.all_gather_data(log) for value in values]
        assert logged == ([pytest.approx(mean_of_all(mesh))] if mtp else [])


@meshes
def test_the_faulty_guard_is_refused_on_every_rank_that_enters_unless_it_is_harmless(mesh):
    group = mesh.group("dp", "cp")
    loss = samples(mesh)
    with mesh.where(pp="last", cp=0, tp=0) as enters:
        if not enters:
            return
        if mesh.axes["cp"] == 1:
            group.all_reduce(loss)  # all members pass: they differ along dp only
            return
        with pytest.raises(GuardError, match="cp") as raised:
            group.all_reduce(loss)
        assert "dp×cp" in str(raised.value)
        assert torch.equal(loss, samples(mesh))


@pytest.mark.mesh(dp=1, cp=2, tp=2)
def test_third_party_code_under_the_faulty_guard_is_refused_too(mesh):
    foreign = mesh.group("dp", "cp").process_group
    with mesh.where(cp=0, tp=0) as enters:
        if enters:
            with pytest.raises(GuardError, match="cp"):
                dist.all_reduce(torch.ones(1), group=foreign)

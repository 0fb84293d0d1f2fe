"""Environments that answer with images: tokens and pixels of a turn, whatever has shown it."""

import asyncio
import base64
import io
import sys

import numpy as np
import pytest
from PIL import Image

from offbeat_core import Completion, DataError, VersionSegment
from offbeat_data import (
    DataConfig,
    EnvironmentConfig,
    EpisodeHost,
    EpisodeLimits,
    Prompt,
    ToolEnvironment,
    TurnTemplate,
    build_environment,
    load_prompts,
    load_tokenizer,
    play_episode,
)

PROMPT = Prompt(index=0, ids=np.array([1], np.int32), text="?")
SEEN = "<|vision_start|>{}<|vision_end|>"
PAD = "<|image_pad|>"


@pytest.fixture(scope="session")
def tokenizer(vision_folder):
    return load_tokenizer(vision_folder)


@pytest.fixture
def template(tokenizer):
    return TurnTemplate(tokenizer, DataConfig(path=""))


def drawn(seed, height=24, width=32):
    """Pixels, and the file that holds them."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), format="PNG")
    return pixels, buffer.getvalue()


def shown(data):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def words(text):
    return {"type": "text", "text": text}


def said(tokenizer, text="look<|im_end|>"):
    ids = tokenizer.encode([text], add_special_tokens=False)[0]
    segments = (VersionSegment(version=0, num_tokens=len(ids)),)
    logprobs = np.zeros(len(ids), np.float32)
    return Completion(ids=ids, logprobs=logprobs, segments=segments, stop_reason="eos", text=tokenizer.decode(ids))


def test_an_image_in_a_tools_answer_reads_as_one_in_a_prompt_does(tokenizer, template, tmp_path):
    """Its tokens and its pixels are those that a prompt with the same picture has."""
    pixels, data = drawn(1)
    (tmp_path / "a.png").write_bytes(data)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "the sum <image> of it", "images": ["a.png"], "answer": "1"}\n')
    [prompt] = load_prompts(DataConfig(path=str(tmp_path / "rows.jsonl")), tokenizer).train
    content = [words("the sum "), shown(data), words(" of it")]
    reply = template.reply(said(tokenizer), [{"role": "user", "content": content}])
    assert reply.ids.tolist() == tokenizer.encode(["\n"], add_special_tokens=False)[0].tolist() + prompt.ids.tolist()
    assert tokenizer.decode(reply.ids, skip_special_tokens=False).count(PAD) == 12
    [seen] = reply.images
    np.testing.assert_array_equal(seen, pixels)
    np.testing.assert_array_equal(seen, prompt.images[0])
    assert reply.text == "\n[user] the sum [image] of it\n"


def test_several_images_keep_their_order_and_are_brought_to_the_size_that_the_model_sees(tokenizer, template):
    files = [drawn(seed, *size)[1] for seed, size in enumerate(((24, 24), (16, 32), (13, 22)))]
    messages = [
        {"role": "tool", "content": [shown(files[0]), shown(files[1])]},
        {"role": "tool", "content": [words("and"), shown(files[2])]},
    ]
    reply = template.reply(said(tokenizer), messages)
    assert [image.shape[:2] for image in reply.images] == [(24, 24), (16, 32), (16, 24)]
    text = tokenizer.decode(reply.ids, skip_special_tokens=False)
    first = SEEN.format(PAD * 9) + SEEN.format(PAD * 8)
    assert text == f"\n<|im_start|>tool\n{first}<|im_end|>\n<|im_start|>tool\nand{SEEN.format(PAD * 6)}" + (
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_words_that_look_like_an_image_are_none(tokenizer, template):
    _, data = drawn(1)
    [[pad]] = tokenizer.encode([PAD], add_special_tokens=False)
    reply = template.reply(said(tokenizer), [{"role": "tool", "content": [words(f"a{PAD}b"), shown(data)]}])
    assert reply.ids.tolist().count(pad) == 12
    assert template.reply(said(tokenizer), [{"role": "tool", "content": f"a{PAD}b"}]).images == ()


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "not in base64"),
        (shown(b"no picture"), "no image that Pillow reads"),
        ({"type": "image_url"}, "nothing is fetched"),
        ({"type": "image", "image": "a.png"}, "texts only, and images as image_url"),
    ],
)
def test_what_is_no_image_fails_its_episode_in_words(part, text, tokenizer, template):
    with pytest.raises(DataError, match=text):
        template.reply(said(tokenizer), [{"role": "tool", "content": [part]}])


def test_a_model_without_eyes_fails_the_episode_in_words(make_tokenizer):
    blind = make_tokenizer("chatml")
    messages = [{"role": "tool", "content": [shown(drawn(1)[1])]}]
    with pytest.raises(DataError, match=r"texts only to this model: .* takes no images"):
        TurnTemplate(blind, DataConfig(path="")).reply(said(blind), messages)


def test_a_later_turn_is_sampled_with_all_images_told_before_and_learned_with_them(tokenizer, template):
    """A tool that draws: each turn sees what the turns before were shown."""
    files = [drawn(seed)[1] for seed in range(2)]
    environment = ToolEnvironment({"draw": lambda number: [words("here:"), shown(files[number])]})
    calls = [f'<tool_call>{{"name": "draw", "arguments": {{"number": {at}}}}}</tool_call><|im_end|>' for at in (0, 1)]
    turns, given = iter([*calls, "done<|im_end|>"]), []

    async def sample(context_ids, images, _max_tokens):
        given.append((context_ids, images))
        return said(tokenizer, next(turns))

    limits = EpisodeLimits(max_turns=3, max_tokens=999, max_turn_tokens=99)
    trajectory = asyncio.run(play_episode(PROMPT.ids, sample, environment.step, template, limits))
    assert [len(images) for _, images in given] == [0, 1, 2]
    sequence = trajectory.to_sequence(PROMPT.ids)
    wanted = [drawn(seed)[0] for seed in range(2)]
    np.testing.assert_array_equal(given[2][1], wanted)
    np.testing.assert_array_equal(sequence.images, wanted)
    pad = tokenizer.encode([PAD], add_special_tokens=False)[0][0]
    assert [int((context_ids == pad).sum()) for context_ids, _ in given] == [0, 12, 24]
    assert int((sequence.ids == pad).sum()) == 24
    assert not sequence.loss_mask[sequence.ids == pad].any()


SERVER = '''
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("drawings")


@server.tool()
def draw() -> list:
    """A drawing."""
    return ["here:", Image(path=sys.argv[1])]


server.run()
'''


@pytest.mark.parametrize("shows_images", [True, False])
def test_images_of_an_mcp_server_are_shown_or_named(shows_images, tokenizer, template, tmp_path):
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    pixels, data = drawn(5)
    (tmp_path / "drawing.png").write_bytes(data)
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), str(tmp_path / "drawing.png")]
    config = EnvironmentConfig(name="mcp", options={"command": command, "shows_images": shows_images})

    async def ask():
        host = EpisodeHost(build_environment(config), 30.0)
        await host.reset(0, PROMPT)
        answer = await host.step(0, '<tool_call>{"name": "draw", "arguments": {}}</tool_call>')
        await host.close(0)
        return answer

    reply = template.reply(said(tokenizer), asyncio.run(ask()))
    assert len(reply.images) == shows_images
    if shows_images:
        np.testing.assert_array_equal(reply.images[0], pixels)
        assert reply.text == "\n[tool] here:[image]\n"
    else:
        assert reply.text == "\n[tool] here:\n[image]\n"

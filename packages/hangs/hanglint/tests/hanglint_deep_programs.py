"""Programs of one shape, as deep or as long as the parser takes them, and deeper."""


def deep_programs() -> dict[str, str]:
    """Source by the name of its shape."""
    indented = "\n".join(f"{' ' * depth}if rank == {depth}:" for depth in range(95))
    functions = "\n".join(f"{' ' * depth}def f{depth}():" for depth in range(95))
    return {
        "parentheses": f"a = {'(' * 150}0{')' * 150}\n",
        "too many parentheses": f"a = {'(' * 1_000}0{')' * 1_000}\n",
        "lists": f"a = {'[' * 100}{']' * 100}\n",
        "sum": f"a = {' + '.join(['dist.get_rank()'] * 5_000)}\n",
        "attributes": f"a{'.b' * 5_000}()\n",
        "calls": f"a{'()' * 2_000}\n",
        "calls in calls": f"{'f(' * 90}rank{')' * 90}\n",
        "subscripts": f"a{'[0]' * 2_000}\n",
        "not": f"if {'not ' * 2_000}rank:\n    dist.barrier()\n",
        "minus": f"a = {'-' * 5_000}1\n",
        "awaits": f"async def f():\n    {'await (' * 150}g(){')' * 150}\n",
        "lambdas": f"a = {'lambda: ' * 1_000}0\n",
        "choices": f"a = {'0 if rank else ' * 3_000}1\n",
        "elif": "if rank == 0:\n    pass\n" + "".join(f"elif rank == {n}:\n    dist.barrier()\n" for n in range(3_000)),
        "compare": f"a = {' < '.join(['rank'] * 5_000)}\n",
        "and": f"if {' and '.join(['rank'] * 5_000)}:\n    dist.barrier()\n",
        "blocks": f"{indented}\n{' ' * 95}dist.barrier()\n",
        "functions": f"{functions}\n{' ' * 95}dist.barrier()\n",
        "many functions": "".join(f"def f{n}():\n    return f{n + 1}()\n" for n in range(3_000)),
        "circle": "".join(f"def f{n}():\n    f{(n + 1) % 500}()\n    f{(n * 7) % 500}()\n" for n in range(500)),
        "one long line": f"a = {['x' * 10] * 20_000}\n",
        "many names": "".join(f"a{n} = a{n + 1} = rank\n" for n in range(5_000)),
        "chain": "a0 = dist.get_rank()\n"
        + "".join(f"a{n + 1} = a{n}\n" for n in range(3_000))
        + "if a3000: dist.barrier()\n",
        "inheritance": "".join(f"class A{n}(A{n + 1}): pass\n" for n in range(2_000)) + "class A2000(A0): pass\n",
        "decorators": "@f\n" * 2_000 + "def f(): dist.barrier()\n",
        "implicit concatenation": "a = (" + "'x'\n" * 20_000 + ")\n",
        "tries": "".join(f"{' ' * n}try:\n" for n in range(90))
        + " " * 90
        + "dist.barrier()\n"
        + "".join(f"{' ' * n}except E{n}:\n{' ' * n} return\n" for n in reversed(range(90))),
        "circular imports": "from odd import *\nimport odd as odd\nfrom . import odd\nfrom .odd import f\nf = f\nf()\n",
    }

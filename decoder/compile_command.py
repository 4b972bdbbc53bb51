"""``python -m decoder models --compile``: build a model's steps while a person waits. Importing this is cheap."""

from __future__ import annotations

from rich.console import Console

from decoder import cache, catalog
from decoder.errors import RequestError


def compile_now(name: str, role: str, layers: int, dtype: str, err: Console) -> None:
    """Build what a model lacks, here and now, and say so on ``err``. Raises RedlineError."""
    from decoder import packages
    from decoder.assemble import runner_of
    from decoder.compiled import CompiledRunner
    from decoder.loading import load

    entry = catalog.find(name)
    role = role or ("draft" if layers or (entry and entry.kind == "draft") else "target")
    if role not in ("target", "draft"):
        raise RequestError(f"--role is target or draft, not {role!r}")
    loaded = load(name, dtype, "cpu")
    runner = runner_of(loaded, role)
    if not isinstance(runner, CompiledRunner):
        from decoder.fused import why_not

        raise RequestError(f"{name} is not compiled: {why_not(loaded.model)}")
    try:
        steps = (runner.short(layers) if layers else runner).steps
    except ValueError as error:
        raise RequestError(f"--layers {layers}: {error}") from None
    if steps.blocked:
        raise RequestError(f"{name} is not compiled: {steps.blocked}")
    for width, recipe in steps.recipes.items():
        what = f"{name}, {width} per pass" if recipe.size else recipe.name  # the kernel holds no weights
        if recipe.built:
            err.print(f"{what}: already compiled")
            continue
        with err.status(f"compiling {what} ({'a minute or two' if recipe.size else 'some seconds'})"):
            packages.build_apart(recipe)
        err.print(f"{what}: compiled")
    err.print(cache_line())


def cache_line() -> str:
    """What compiled steps take on the disk."""
    return f"compiled steps take {cache.compiled_size() / 1e6:,.0f} MB in {cache.compiled_dir()}"

"""The command line of ``app.py``: serve the playground, or make a line for the password file.

Every mistake ends with exit code 2 and one line on stderr; heavy imports wait until the arguments are known to be good.
"""

from __future__ import annotations

import errno
import getpass
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from decoder.catalog import DEFAULT_TARGET
from decoder.errors import RedlineError
from decoder.terminal import run_typer
from playground import auth

if TYPE_CHECKING:
    from playground.compiling import Compiling
    from playground.model_thread import Load

DEFAULT_DB = "sqlite:///redline.db"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and end the process: 0 when all is well, 2 for a mistake of the caller."""
    raise SystemExit(run_typer(app, arguments, "python app.py"))


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 7860,
    db: Annotated[str, typer.Option(help="Database of the runs.")] = DEFAULT_DB,
    target: Annotated[str, typer.Option(help="Target that is loaded at the start.")] = DEFAULT_TARGET,
    auth_file: Annotated[
        Path | None, typer.Option("--auth", help="File with name:hash lines; visitors must sign in.")
    ] = None,
    compiling: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile decode steps behind the first runs, and use them.")
    ] = True,
) -> None:
    """Serve the Redline playground."""
    if context.invoked_subcommand is not None:
        return
    if not 1 <= port <= 65535:
        raise RedlineError(f"--port must be from 1 to 65535, not {port}")
    users = auth.read_password_file(auth_file) if auth_file else None
    check_address(host, port)
    if users is None and not is_loopback(host):
        print(
            f"redline: warning: {host} can be reached by others, and everyone who reaches it can use and change "
            "everything; give --auth FILE (lines from `python app.py hash-password`)",
            file=sys.stderr,
        )
    if not compiling:
        os.environ["REDLINE_COMPILE"] = "0"
    run_server(host, port, db, target, users)


@app.command("hash-password")
def hash_password(
    name: Annotated[
        str, typer.Argument(help="User name; asked for at a terminal, else only the hash is printed.")
    ] = "",
) -> None:
    """Print a line for the password file, name:hash, to be added with >> FILE.

    The password comes from a prompt, or from stdin. A password from stdin without NAME prints only the hash, which is
    no line yet: put the name and a colon before it.
    """
    asked = sys.stdin.isatty()
    if asked and not name:
        # On stderr, like getpass's prompts: stdout may be the password file.
        print("Name (empty: only the hash): ", end="", file=sys.stderr, flush=True)
        name = sys.stdin.readline().strip()
    problem = auth.check_name(name) if name else None
    if problem:
        raise auth.AuthError(problem)
    if asked:
        password = getpass.getpass("Password: ")
        if getpass.getpass("Again: ") != password:
            raise auth.AuthError("the two passwords differ")
    else:
        password = sys.stdin.readline().rstrip("\n").rstrip("\r")
    print(auth.password_line(name, password) if name else auth.hash_password(password))


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_address(host: str, port: int) -> None:
    """Raise RedlineError when nobody can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise RedlineError(f"--host {host!r} is not an address of this machine") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RedlineError(f"port {port} on {host} is in use: choose another with --port") from None
            if error.errno in (errno.EACCES, errno.EPERM):
                raise RedlineError(f"port {port} may not be used by this account: choose one above 1023") from None
            raise RedlineError(f"nobody can listen on {host} port {port}: {error.strerror}") from None


def quiet_environment() -> None:
    """No analytics, no telemetry, no proxy between this process and itself. Before Gradio is imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_RUN_HISTORY"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    for name in ("NO_PROXY", "no_proxy"):
        known = [part for part in os.environ.get(name, "").split(",") if part]
        os.environ[name] = ",".join([*known, "127.0.0.1", "localhost", "::1"])
    for name in ("GRADIO_ALLOWED_PATHS", "GRADIO_SHARE", "GRADIO_ROOT_PATH", "GRADIO_MCP_SERVER"):
        os.environ.pop(name, None)


def run_server(
    host: str,
    port: int,
    db: str,
    target: str,
    users: dict[str, str] | None,
    load: Load | None = None,
    compiling: Callable[[Callable[[], None]], Compiling] | None = None,
) -> None:
    """Serve until the process is asked to end, then save what is going on. ``load`` replaces the decoder, ``compiling``
    what compiles behind it (tests)."""
    quiet_environment()
    # The engine's thread asks for the interpreter after each pass; whoever serves a page would keep it for 5 ms then.
    sys.setswitchinterval(0.0005)
    from storage import open_store

    store = open_store(db)
    if store.read_only:
        print(f"redline: warning: {store.label} may only be read: new runs are not kept", file=sys.stderr)
    print("Redline is starting", flush=True)
    from decoder.request import GenerationRequest
    from playground.app_factory import build_app, launch_options
    from playground.service import ModelService

    given: dict[str, Any] = {"load": load, "compiling": compiling}
    service = ModelService(store, **{name: value for name, value in given.items() if value})
    if os.environ.get("REDLINE_COMPILE") != "0":
        service.compile_behind()
    demo = build_app(store, service, target=target, signed_in=users is not None)
    options: dict[str, Any] = launch_options()
    if users is not None:
        options |= {"auth": auth.verifier(users), "auth_message": "Redline: sign in to see and share runs."}
    _, url, _ = demo.launch(server_name=host, server_port=port, prevent_thread_lock=True, **options)
    # Only now: the page is open before the first heavy library is imported.
    service.preload(GenerationRequest(prompt="warm-up", target=target))
    print(f"Redline is open at {url}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause() if hasattr(signal, "pause") else demo.block_thread()
    except KeyboardInterrupt:
        print("Redline is closing", flush=True)
    finally:
        service.close()
        demo.close(verbose=False)

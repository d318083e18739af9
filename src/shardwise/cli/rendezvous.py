"""`shardwise rendezvous`: serve the rendezvous of runs on a host that does not train."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.spec.foreign_text import echo


def rendezvous(
    address: Annotated[
        str,
        typer.Argument(
            help="Address and port to listen on, as in PET_RDZV_ENDPOINT.", show_default=False
        ),
    ],
    lost_after_s: Annotated[
        float, typer.Option(min=1, help="Seconds of silence after which a host is lost.")
    ] = 10.0,
) -> None:
    """Serve the rendezvous of runs on several hosts.

    Without it, the host that PET_RDZV_ENDPOINT names serves while it trains, and its loss stops all
    hosts until it is back. With it, no training host is special. It keeps nothing on disk and may
    be restarted at any time: runs in progress do not notice. Ctrl-C ends it.

    It takes the secret of the runs from SHARDWISE_RDZV_SECRET, or from the file that
    SHARDWISE_RDZV_SECRET_FILE names.
    """
    import os
    import signal
    import threading

    from shardwise.launch.rendezvous_address import bind_address, parse_endpoint
    from shardwise.launch.rendezvous_server import RendezvousServer
    from shardwise.launch.shared_secret import secret_for, take_secret
    from shardwise.spec.record import SpecError

    given = take_secret(os.environ)
    listen_on = parse_endpoint(address)
    secret = secret_for(listen_on, given)
    try:
        server = RendezvousServer(bind_address(listen_on), secret, lost_after_s)
    except OSError as error:
        raise SpecError(
            f"address: cannot listen on {address} ({error.strerror or error}); use an address of "
            "this host and a free port"
        ) from None
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server.serve_in_background()
    echo(f"shardwise: serving the rendezvous at {address}", err=True)
    ended.wait()
    server.close()

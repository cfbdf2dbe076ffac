"""The entry of `treeserve`, and of `python -m treeserve_cli`: loads the command, which takes a while, and runs it."""

import signal


def main() -> None:
    """Run the command. Ctrl-C while it loads ends the process at once and quietly, as programs end by default."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from treeserve_cli.main import app

    signal.signal(signal.SIGINT, handler)
    app()


if __name__ == "__main__":
    main()

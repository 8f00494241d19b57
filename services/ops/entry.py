"""What the `libra` script calls: nothing heavy is imported before Ctrl-C has an answer."""


def main() -> int:
    """Runs one command; see services.ops.__main__. 130 also if interrupted while its modules are read."""
    try:
        from services.ops.__main__ import main as run

        return run()
    except KeyboardInterrupt:
        return 130

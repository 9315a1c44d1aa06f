"""`python -m shardkit_tools` is `shardkit`."""

from shardkit_tools.main import run

if __name__ == "__main__":
    run()

"""`python -m monograph` is the command `monograph`."""

from monograph.cli.main import main

if __name__ == "__main__":
    main()

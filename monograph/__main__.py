"""`python -m monograph` is the command `monograph`."""

from monograph.cli import main

if __name__ == "__main__":
    main()

"""`python -m frugal`, and so `accelerate launch -m frugal train CONFIG`."""

from frugal.cli.main import main

if __name__ == "__main__":
    main()

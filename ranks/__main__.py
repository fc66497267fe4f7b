"""`python -m headrace.ranks`: one rank."""

from headrace.ranks.start import main

if __name__ == "__main__":
    main()

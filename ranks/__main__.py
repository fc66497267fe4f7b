"""`python -m headrace.ranks`: one rank."""

from headrace.ranks.seat import take_seat

if __name__ == "__main__":
    take_seat()
    from headrace.ranks.start import main

    main()

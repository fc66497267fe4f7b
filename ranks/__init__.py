"""What a rank is: topology, the courier, the ledger, the generator loop, the trainer loop, recovery."""

"""The proof that training goes on from a checkpoint as if it had never stopped."""

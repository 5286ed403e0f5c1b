"""The program, its typed ports, its text and its rules."""

"""Collectives in programs: which ops begin and end one, what they read meanwhile, and their order.

In: programs. Out: answers about their nodes. Imports `ir`, `ir/call`.
"""

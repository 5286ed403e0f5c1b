"""Sizes that vary from call to call: exact arithmetic on them, and what is known of them beforehand."""

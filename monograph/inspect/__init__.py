"""What a user can look at: text, drawings, profiles and values of programs and builds.

In: builds. Out: text and pages. Imports builds of `compiler`.
"""

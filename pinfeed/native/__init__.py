"""Compiled copies of rows, if they were built when pinfeed was installed.

Every caller has a way without them, with equal results.
"""

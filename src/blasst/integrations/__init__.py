"""Hosts that run blasst attention; one file per host, and importing this package imports none of them."""

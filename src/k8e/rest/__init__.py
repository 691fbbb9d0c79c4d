"""REST: one sandbox per conversation, with the starter kit's paths, and everything else in JSON.

A client of the gateway inside of its HTTP endpoint. Every route calls operations of the gateway or
of a guest, so roles, limits, audit rows and statuses are those of every other way to call them.
"""

"""Agent2Agent: other agents give k8e code tasks over JSON-RPC, and get their output back.

Both generations of the protocol are served, 1.0 and 0.3. ``dialects`` is the wire, ``message``
reads what a message wants, ``tasks`` and ``runner`` run it, ``rpc`` answers, ``http`` is the app of
one caller, and ``card`` is the public document.
"""

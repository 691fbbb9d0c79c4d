"""The controller of sandboxes on Kubernetes: ``k8e controller``.

It serves the resources of agent-sandbox with upstream's behaviour. What an object becomes is
decided by pure functions (``desired``, ``conditions``, ``policies``); the modules named by a kind
(``sandboxes``, ``claims``, ``warm_pools``, ``templates``) compare that with what is there and write
the difference.
"""

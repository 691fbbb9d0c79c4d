"""Keeps variables between runs of code, as a notebook does, and shows what values look like."""

from k8e import sandbox_session

CELLS = (
    "import json\nprices = {'tea': 3, 'coffee': 4}",
    "total = sum(prices.values())\nprint('added up')\ntotal",
    "display({'text/html': f'<b>{total}</b>', 'text/plain': str(total)}, raw=True)",
    "prices['milk']",
)

with sandbox_session() as (client, session_id), client.create_context(session_id) as context:
    for code in CELLS:
        done = context.run(code, on_stdout=lambda data: print("printed:", data.decode().strip()))
        for result in done.results:
            print(f"[{done.execution_count}]", result.text, result.formats())
        if done.error:
            print(f"[{done.execution_count}]", done.error.name, done.error.value)

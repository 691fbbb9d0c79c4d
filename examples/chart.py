"""Draws a chart of a table with pandas and matplotlib in a sandbox, and keeps it as a PNG file.

Here both come from the host, whose /usr a sandbox sees: Debian has them as python3-pandas and
python3-matplotlib. Elsewhere ``sb.pip_install("pandas", "matplotlib")`` gets them.
"""

from pathlib import Path

import k8e

CODE = """
import pandas
sales = pandas.read_csv("sales.csv", index_col="month")
sales.plot.bar(title="Sold in each month")
sales["sold"].sum()
"""

with k8e.Sandbox() as sb, sb.context() as context:
    sb.files.write("sales.csv", "month,sold\njan,3\nfeb,5\nmar,8\n")
    total, chart = context.run(CODE).results
print(total.text, "sold;", Path("chart.png").write_bytes(chart.png or b""), "bytes of chart.png")

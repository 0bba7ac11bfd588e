"""Results as one page of HTML, or one picture, that needs nothing else: no library, no network, no second file.

Standard library only; knows no engine. What it shows comes from `result.json` and the configuration of the run.
"""

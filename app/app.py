"""The app as a Hugging Face Space: shows the runs named by the variable `LZE_RUNS`."""

import os

from lze_trl.app import launch


# Ids of dataset repos, separated by spaces or commas
runs = os.environ.get("LZE_RUNS", "").replace(",", " ").split()

if __name__ == "__main__":
    # A Space is reached through its container's address
    launch(runs, host="0.0.0.0" if "SPACE_ID" in os.environ else "127.0.0.1")

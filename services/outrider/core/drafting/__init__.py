"""Growth policies: how a drafter's tree grows below the committed tokens. One file for each paper."""

"""What the rounds of a session verify, the strategy that they follow, what they ask of the peers, how long they wait.
Shared by whatever verifies: the verifier, and the proposer in vLLM."""

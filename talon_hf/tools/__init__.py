"""What is used beside the algorithm and never ships to the Hub: the command, and what it is made of."""

"""What the suite builds around the clients, and what each cell of its table must show."""

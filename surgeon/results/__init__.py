"""What was measured, as records and tables, and the cards that show it."""

"""What passes over a model share: how programs are ordered, measured, and kept in memory."""

"""What passes have found: records, tables, words, pictures, sections of the page, and the cards that show it."""

"""Findings of passes: records, tables, words, pictures, sections of the page, and model cards."""

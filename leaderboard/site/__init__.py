"""The board's pages, made of what `leaderboard/rank/board.py` computed; nothing is computed here.

`pages.py` writes the folder, `words.py` says how numbers and links are written, `templates/` hold the text.
"""

"""What turns results into something to look at: tables, figures, a page, files to publish."""

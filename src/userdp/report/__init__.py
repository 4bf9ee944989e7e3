"""What a run says about itself: statement, model card, HTML page, pictures."""

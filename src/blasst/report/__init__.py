"""Pictures, the HTML report and the demo that fills them."""

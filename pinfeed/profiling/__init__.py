"""What a loop did with its time: counted, recorded, drawn and said."""

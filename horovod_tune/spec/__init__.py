"""What one trial asks for, validated once."""

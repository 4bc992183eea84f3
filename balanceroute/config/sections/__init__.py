"""The sections of the configuration, by what they are about; `config/models.py` puts them together."""

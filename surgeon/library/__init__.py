"""What commands do, as functions: options in, a typed result out. A command reads options, calls one, and prints."""

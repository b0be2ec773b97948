// What the headers are compiled with that the tests share.

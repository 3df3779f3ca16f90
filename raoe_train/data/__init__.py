"""Read sentence pairs, triplets, lists and labelled texts from files, hubs and the folders of public data sets."""

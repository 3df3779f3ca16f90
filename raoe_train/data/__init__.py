"""Read sentence pairs, triplets, lists and labelled texts from files, hubs and folders of public data sets."""

"""Sources make samples: this folder reads images, archives, arrays and the user's own objects.

What every source is:

- ``protocol``: the three shapes that a source may have
- ``config``: what a job carries to open the same source again; ``open`` opens it
- ``order``: which samples an epoch takes, and in which order; ``seeding``: the random numbers of a sample

One file per kind of source: ``images``, ``tar``, ``arrays``, ``dataset``, ``generator``, ``keras``, ``torch``,
``installed`` (sources of other distributions) and ``choice`` (a split, balanced classes, several sources by weight).

What several kinds use:

- ``image_files`` finds and reads the images of a folder or zip; ``labels`` labels them; ``decode`` makes pixels
- ``tar_index`` finds the members of a tar; ``files`` describes any file and makes fingerprints
- ``items`` turns an item of any Python type into a sample; ``transform`` calls the user's functions
- ``names`` finds the objects that a config names; ``allowed`` says which ones a worker may import

Redis, RQ and the packing of entries do not live here.
"""

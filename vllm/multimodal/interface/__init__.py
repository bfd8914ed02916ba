"""Base classes for a family's processing of images, sounds and videos, and their data types. They
do not depend on families.
"""

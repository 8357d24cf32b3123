"""``semel demo``: payments in a storm of retries, double clicks and kill -9, and a referee who counts the charges.

``run`` starts an ``api`` (twice) and a payment ``provider`` as processes of their own, and kills the api's workers;
``storm`` is the clients; ``referee`` judges by what the clients and the provider wrote down, and never asks Semel;
``show`` is what a person sees.
"""

"""``semel demo``: payments in a storm of retries, double clicks and kill -9, and a referee that counts the charges.

``run`` starts an ``api`` (twice) and a payment ``provider`` as processes of their own, and kills the api's workers;
``storm`` is the clients; ``referee`` judges by the records of the clients and the provider, and never asks Semel;
``show`` is the output.
"""

"""The admin, and nothing else. Tests serve what they need with ``project.serving``."""

from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]

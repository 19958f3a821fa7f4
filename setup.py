"""The package's metadata and dependencies stand in settings.ini, the one place for both; this file only hands them to setuptools."""
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
settings = config["DEFAULT"]
requirements = settings["requirements"].split()
development = settings["dev_requirements"].split()
setup(
    name=settings["lib_name"], version=settings["version"], description=settings["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    license="Apache-2.0", author=settings["author"], author_email=settings["author_email"], keywords=settings["keywords"],
    packages=find_packages(include=["cs_clip", "cs_clip.*"]), package_data={"cs_clip": ["published_figures/*.csv"]},
    python_requires=f">={settings['min_python']}", install_requires=requirements, extras_require={"dev": development},
    entry_points={"console_scripts": settings["console_scripts"].split(), "nbdev": [f"{settings['lib_name']}=cs_clip._modidx:d"]},
)

"""Types of the names that ``__init__.py`` imports when they are used."""

from toolkit.api import Config as Config
from toolkit.api import Decoder as Decoder
from toolkit.api import GlobalBatches as GlobalBatches
from toolkit.api import Trainer as Trainer
from toolkit.api import build_optimizer as build_optimizer
from toolkit.api import export_hf as export_hf
from toolkit.api import generate as generate
from toolkit.api import init_weights as init_weights
from toolkit.api import learning_rate as learning_rate
from toolkit.api import load_checkpoint as load_checkpoint
from toolkit.api import load_config as load_config
from toolkit.api import load_model as load_model
from toolkit.api import load_weights as load_weights
from toolkit.api import new_model as new_model
from toolkit.api import open_data as open_data
from toolkit.api import run as run
from toolkit.api import save_checkpoint as save_checkpoint
from toolkit.api import start as start

__all__: list[str]
__version__: str

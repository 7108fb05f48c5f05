"""Fixtures of the models in HDFS."""

from tests.tables.hdfs_models import cluster as cluster
from tests.tables.hdfs_models import lasting_model as lasting_model
from tests.tables.hdfs_models import model as model
from tests.tables.hdfs_models import nameservice as nameservice
from tests.tables.hdfs_models import own_model as own_model
from tests.tables.hdfs_models import root as root

from hps.triton import TritonPythonModel as TritonPythonModel
